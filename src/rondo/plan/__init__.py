"""`rondo plan`: a period, simulated. From what a recorded run measured: what other splits and sizes would take.

    records.py     what a period costs, what it is asked to do, what it came to
    calibrate.py   a recorded run -> costs and lengths
    work.py        lengths that were seen -> the groups of a period that was not
    decoder.py     one engine's slots, in decode steps
    training.py    the trainer's half of a period
    simulate.py    the period: engines, rewards, trainer, publication, as events
    search.py      every split of N devices, ranked
    show.py        as a table and a sentence, or JSON

Nothing here imports torch, and nothing is random but for a seed.
"""
