"""Deletes a feature from a copy of the library, and runs the tests of all that is left.

``python -m tests.deletion`` (``make test-deletion``) takes each feature of ``features.py`` in turn:

  files     the feature's files are removed from a copy of the tree
  lines     imports of these files, and the names that they brought, leave faces (``__init__.py``) and registries
  imports   every module that is left must import
  tests     test files that import what is gone are removed; the rest of ``CORE``, a minute of processor time of exact
            trainings, checkpoints, plans and metrics, must pass

A feature that does not pass stands in ``NOT_YET`` with the reason.

    python -m tests.deletion --only rows      features whose name has this text
    python -m tests.deletion --turn 2         two features, by the commit
    python -m tests.deletion --keep FOLDER    the copies stay there, to be looked at
"""
