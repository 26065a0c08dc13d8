//! Where a pass runs.

/// Runs `work` on a thread of the rayon pool, and directly when the caller is one. A pass is dozens of short
/// parallel products; started from outside, each of them would put its caller to sleep and wake it again.
pub fn run<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    match rayon::current_thread_index() {
        Some(_) => work(),
        None => rayon::scope(|_| work()),
    }
}
