"""Tests of several processes that join, agree and leave."""
