#!/usr/bin/env python
"""The same as the console command edit-fit."""

from megatron_edit.commands.fit import main

if __name__ == "__main__":
    main()
