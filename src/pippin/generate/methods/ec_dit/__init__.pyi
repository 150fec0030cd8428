from .compute_map import plot_compute_map as plot_compute_map
from .upcycling import upcycle as upcycle
