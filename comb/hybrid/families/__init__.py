"""Families of transitions, one file each: its `Transition`, its plain twin, and the scans that it is read from.

A new family is a new file: a subclass of `Transition` under ``@register_family``, a reader of its scan's arguments
under ``@reads_scan("name_of_the_scan")``, and a plain recurrence that the shared test compares it with.
"""
