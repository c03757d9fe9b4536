"""Scaling laws and planners for local SGD against synchronous training. Imports no torch.

`forms`, `hoffmann`, `fit`, `compare`, `runs`, `logs`: laws fitted to runs. `published`: numbers of
the literature. `closed_forms`, `clock`: formulas of time and bandwidth. `cluster`, `penalty`,
`topology`, `planner`, `crossover`, `edge`: plans for hardware. `events`, `simulate`: runs as
discrete events. `plots`, `tables`: what a person looks at.
"""
