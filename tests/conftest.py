"""What every test gets: one thread, no display, no window, and no run folder in the working tree."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy load: the suite shares its cores
os.environ.setdefault("MPLBACKEND", "Agg")
