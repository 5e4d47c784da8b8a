"""Physics back ends behind one small protocol."""
