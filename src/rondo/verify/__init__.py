"""The proof: recorded groups trained again through the synchronous schedule, and every tensor compared.

command.py      `rondo verify` as it is typed
verify.py       a run to record, and all that is checked about a recorded one
account.py      what the journal itself must show
start.py        where a replay can start
schedules.py    the micro-batches of a schedule: recorded, synchronous, shuffled
group.py        processes that train a journal again, on as many ranks as asked; plan.py: what they are told, and answer
worker.py       such a process; prover.py: what its first rank does
compare.py      two tensors: bits, units in the last place, norms; and the floating-point bound
certificate.py  what each mode promises, the verdict, as a table and as certificate.json
replay.py       `rondo replay`: one recorded period again
"""
