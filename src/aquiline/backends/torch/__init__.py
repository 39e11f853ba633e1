"""The backend in torch: the readable twin of the native one, on whatever device torch has.

Everything that changes while a text is written lies in tensors on the device (`state`, `storage`); a step issues
operations on them and reads nothing. Where a length depends on data, rows are padded to a length the host knows and
masked. Read in this order: `backend` (a step), `draft` (how trees grow), `accept` (what is kept), `rules` and `draw`.
"""
