"""What a user types: one file a console command."""
