#!/usr/bin/env python
"""The same as the console command edit-export."""

from megatron_edit.commands.export import main

if __name__ == "__main__":
    main()
