"""What is loaded into the processes of the script."""
