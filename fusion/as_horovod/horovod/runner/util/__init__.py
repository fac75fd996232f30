"""Helpers of Horovod's launcher that tests and libraries borrow."""
