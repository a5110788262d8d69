"""QDQ insertion: scales, linear layers, elementwise operators, embedding tables, engine workarounds."""
