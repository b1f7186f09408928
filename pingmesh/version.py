"""The release, for whoever should not pay for asking the installed package: that takes a megabyte of imports."""

VERSION = "0.1.0"
