"""The comparison of all legs in results, bytes and times."""
