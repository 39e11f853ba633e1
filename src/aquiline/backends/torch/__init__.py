"""The backend in torch: the readable twin of the native one, on whatever device torch has.

Everything that changes during generation lies in tensors on the device (`state`, `storage`). A step issues operations
on them and reads nothing back. Where a length depends on data, rows are padded to a length that the host knows, and
masked. Read in this order: `backend` (a step), `draft` (how trees grow), `trees` (which path is kept), `rules`, `draw`.
"""
