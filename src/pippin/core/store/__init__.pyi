from . import catalog as catalog, store as store
