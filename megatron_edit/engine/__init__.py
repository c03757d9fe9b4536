"""The method: when units synchronise, what each replica counts, the outer step."""
