"""What `doctor` checks, by subject. A check never raises: what it cannot find out is a finding too."""
