"""How it is saved: one module a mechanism, all behind one interface."""
