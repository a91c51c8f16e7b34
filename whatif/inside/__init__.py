"""The part of whatif that runs inside the script's process, after the script has imported torch."""
