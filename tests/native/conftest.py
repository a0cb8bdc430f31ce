"""What is here beside tests."""

collect_ignore = ["border.py"]  # a program, which the tests of the sanitizers run
