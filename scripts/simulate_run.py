#!/usr/bin/env python
"""The same as the console command edit-simulate."""

from megatron_edit.commands.simulate import main

if __name__ == "__main__":
    main()
