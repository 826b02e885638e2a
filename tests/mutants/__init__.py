"""Small mistakes put into the library, one at a time, each of which some test must see; see docs/mutants.md."""
