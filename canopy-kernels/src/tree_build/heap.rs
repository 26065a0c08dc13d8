//! A binary heap whose order is given from outside, since ties between two entries are settled by the paths of
//! the nodes taken so far.

/// Pops the entry that `before` puts first.
#[derive(Debug)]
pub(super) struct Heap<T> {
    entries: Vec<T>,
}

impl<T> Heap<T> {
    /// An empty heap.
    pub(super) fn new() -> Self {
        Self { entries: Vec::new() }
    }

    /// Adds an entry.
    pub(super) fn push(&mut self, entry: T, before: impl Fn(&T, &T) -> bool) {
        self.entries.push(entry);
        let mut child = self.entries.len() - 1;
        while child > 0 {
            let parent = (child - 1) / 2;
            if !before(&self.entries[child], &self.entries[parent]) {
                break;
            }
            self.entries.swap(child, parent);
            child = parent;
        }
    }

    /// Takes the first entry.
    pub(super) fn pop(&mut self, before: impl Fn(&T, &T) -> bool) -> Option<T> {
        if self.entries.is_empty() {
            return None;
        }
        let first = self.entries.swap_remove(0);
        let mut parent = 0;
        loop {
            let (left, right) = (2 * parent + 1, 2 * parent + 2);
            let Some(mut best) = (left < self.entries.len()).then_some(left) else { break };
            if right < self.entries.len() && before(&self.entries[right], &self.entries[left]) {
                best = right;
            }
            if !before(&self.entries[best], &self.entries[parent]) {
                break;
            }
            self.entries.swap(best, parent);
            parent = best;
        }
        Some(first)
    }
}
