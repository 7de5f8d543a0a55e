"""Speed and memory of the package, each relative to an alternative measured in the same run."""
