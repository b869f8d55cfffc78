//! The compiled part of the Python package `ringtrain`.
