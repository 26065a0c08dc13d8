//! Part of canopy.
