#!/usr/bin/env python
"""The same as the console command edit-generate."""

from megatron_edit.commands.generate import main

if __name__ == "__main__":
    main()
