"""Scaling laws and planners for local SGD against synchronous training. Imports no torch.

Laws: `runs` and `logs` read runs, `forms` and `hoffmann` are the families, `fit` and `compare` fit
and test, `published` has the literature's numbers. Plans: `closed_forms` has formulas, `cluster`
the input file, `topology`, `planner`, `crossover` and `edge` evaluate it with the losses of
`penalty`; `trainer_settings` turns a plan into flags. Simulation: `scenario`, `simulate` on the
kernel `events`. `provenance` and `constants` say where numbers come from; `tables`, `json_text`,
`plots`, `law_plots`, `timeline`, `site_report` and `edge_report` are what a person looks at.
`synthetic` checks the fits on runs of known laws; `command` is what the commands share.
"""
