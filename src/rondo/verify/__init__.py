"""The proof: recorded groups trained again through the synchronous schedule, and every tensor compared.

verify.py     what is checked, and what each mode promises: `rondo verify`
group.py      processes that train a journal again, on as many ranks as asked
worker.py     what such a process does, from a plan to measured differences
schedules.py  the micro-batches of a schedule: recorded, synchronous, shuffled, packed otherwise
compare.py    two tensors: bits, units in the last place, norms; and the floating-point bound
certificate.py  the verdict, as a table and as certificate.json
replay.py     `rondo replay`: one recorded period again
"""
