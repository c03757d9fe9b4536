#!/usr/bin/env python
"""The same as the console command edit-preprocess."""

from megatron_edit.commands.preprocess import main

if __name__ == "__main__":
    main()
