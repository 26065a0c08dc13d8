//! What a sequence owns between rounds: pools that every layer indexes by slot.

mod kv;
mod recurrent;

pub use kv::{KvPool, KvPools};
pub use recurrent::{RecurrentPool, RecurrentPools};
