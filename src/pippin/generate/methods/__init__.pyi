from . import dart as dart, ec_dit as ec_dit, simgan as simgan
