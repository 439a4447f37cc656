"""What of this machine kvpage can use, found out by doing it. `kvpage doctor` prints it."""
