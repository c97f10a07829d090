"""What everything else stands on: errors, files, random numbers, loading. No torch and no options."""
