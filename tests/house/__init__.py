"""The project itself: pages, layers, wheel, and the tests of the tests."""
