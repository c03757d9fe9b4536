#!/usr/bin/env python
"""The same as the console command edit-plan."""

from megatron_edit.commands.plan import main

if __name__ == "__main__":
    main()
