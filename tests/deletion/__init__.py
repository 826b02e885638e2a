"""Deletes a feature from a copy of the library, and runs the tests of the remaining code.

``python -m tests.deletion`` (``make test-deletion``) takes each feature of ``features.py`` in turn:

  files     the feature's files are removed from a copy of the tree
  lines     imports of these files, and the imported names, are removed from faces (``__init__.py``) and registries
  imports   every remaining module must import
  tests     test files that import removed code are removed; the rest of ``CORE``, a minute of processor time of exact
            trainings, checkpoints, plans and metrics, must pass

``NOT_YET`` lists the features that do not pass, with the reason.

    python -m tests.deletion --only rows      features whose name has this text
    python -m tests.deletion --turn 2         two features, by the commit
    python -m tests.deletion --keep FOLDER    keeps the copies for inspection
"""
