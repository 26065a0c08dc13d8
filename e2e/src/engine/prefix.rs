//! Saved prefixes: a prompt that starts like an earlier one does not read that start again.
//!
//! A recurrent state cannot be cut back, so a prefix is reusable only at the lengths at which it was saved: multiples of
//! a page, where a conversation's next turn will start, and one token before a prompt's end (the last one has to be
//! read for its logits). Everything a slot owns there is copied: recurrent states, convolution rows, keys, values and the
//! drafter's context. Rows' bits do not depend on where a prompt was cut, so on the CPU a reused prompt's text is the
//! text that reading it would give.

use std::collections::{BTreeMap, HashMap};

use super::CacheStats;
use crate::target::Snapshot;

/// A prefix is saved when it has this many tokens more than the one saved before it.
const LEAST_NEW: usize = 64;

/// Names a prefix: its tokens' hash and their number. Two prefixes of one key are told apart by their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PrefixKey {
    hash: u64,
    pub len: usize,
}

/// What a slot owned after a prefix.
pub(super) struct Saved {
    pub target: Snapshot,
    /// The drafter's context; `None` from a stream that never drafts.
    pub drafter: Option<Snapshot>,
}

struct Entry {
    tokens: Box<[u32]>,
    saved: Saved,
    bytes: usize,
    used: u64,
}

/// Saved prefixes, the least recently used of which make room for new ones.
pub(super) struct PrefixCache {
    page: usize,
    entries: HashMap<PrefixKey, Entry>,
    /// Entries of each length.
    lengths: BTreeMap<usize, usize>,
    clock: u64,
    stats: CacheStats,
}

impl PrefixCache {
    pub fn new(budget: usize, page: usize) -> Self {
        let stats = CacheStats { budget, ..CacheStats::default() };
        Self { page, entries: HashMap::new(), lengths: BTreeMap::new(), clock: 0, stats }
    }

    /// Sets how many bytes the saved prefixes may take.
    pub fn set_budget(&mut self, budget: usize) {
        self.stats.budget = budget;
    }

    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    pub fn is_off(&self) -> bool {
        self.stats.budget == 0
    }

    /// Lengths at which a prompt of `len` tokens is to be saved when it starts from `cached` saved ones.
    pub fn points(&self, len: usize, cached: usize, save_at: Option<usize>) -> Vec<usize> {
        let end = len - 1;
        let pages = (1..=end / self.page).map(|page| page * self.page);
        let mut points: Vec<usize> = pages.chain(save_at).chain([end]).filter(|&p| p <= end).collect();
        points.sort_unstable();
        let mut last = cached;
        points.retain(|&point| {
            let far = point >= last + LEAST_NEW;
            last = if far { point } else { last };
            far
        });
        points
    }

    /// The longest saved prefix of `prompt` that leaves a token to read, with the drafter's context when it is needed.
    pub fn find(&mut self, prompt: &[u32], drafts: bool) -> Option<(PrefixKey, &Saved)> {
        let hashes = hashes(prompt, self.lengths.keys().copied());
        let fits = |key: &&PrefixKey| {
            let entry = self.entries.get(key);
            entry.is_some_and(|entry| {
                prompt.starts_with(&entry.tokens) && (!drafts || entry.saved.drafter.is_some())
            })
        };
        let found = hashes.iter().rev().filter(|key| key.len < prompt.len()).find(fits).copied();
        let Some(key) = found else {
            self.stats.misses += u64::from(prompt.len() > LEAST_NEW);
            return None;
        };
        self.clock += 1;
        self.stats.hits += 1;
        self.stats.reused_tokens += key.len as u64;
        let entry = self.entries.get_mut(&key)?;
        entry.used = self.clock;
        Some((key, &entry.saved))
    }

    /// The key of a prefix that is worth saving, `None` when it is saved already.
    pub fn wanted(&mut self, prefix: &[u32], drafts: bool) -> Option<PrefixKey> {
        let key = *hashes(prefix, [prefix.len()].into_iter()).last()?;
        self.clock += 1;
        match self.entries.get_mut(&key) {
            Some(entry) if *entry.tokens == *prefix && (!drafts || entry.saved.drafter.is_some()) => {
                entry.used = self.clock;
                None
            }
            _ => Some(key),
        }
    }

    /// Saves a prefix; the least recently used ones make room. One that is larger than all the room is not kept.
    pub fn insert(&mut self, key: PrefixKey, prefix: &[u32], saved: Saved) {
        let bytes =
            saved.target.bytes() + saved.drafter.as_ref().map_or(0, Snapshot::bytes) + size_of_val(prefix);
        self.remove(key);
        if bytes > self.stats.budget {
            return;
        }
        while self.stats.bytes + bytes > self.stats.budget {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key);
            let Some(oldest) = oldest else { return };
            self.remove(oldest);
            self.stats.evictions += 1;
        }
        self.clock += 1;
        self.entries.insert(key, Entry { tokens: prefix.into(), saved, bytes, used: self.clock });
        *self.lengths.entry(key.len).or_default() += 1;
        self.stats.bytes += bytes;
        self.stats.entries = self.entries.len();
    }

    /// Forgets a prefix.
    pub fn remove(&mut self, key: PrefixKey) {
        let Some(entry) = self.entries.remove(&key) else { return };
        self.stats.bytes -= entry.bytes;
        self.stats.entries = self.entries.len();
        if let Some(count) = self.lengths.get_mut(&key.len) {
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&key.len);
            }
        }
    }
}

/// Keys of the prefixes of `tokens` of the given rising lengths, those longer than `tokens` left out.
fn hashes(tokens: &[u32], lengths: impl Iterator<Item = usize>) -> Vec<PrefixKey> {
    const PRIME: u64 = 0x9E37_79B9_7F4A_7C15;
    let (mut hash, mut read) = (0x1234_5678_9ABC_DEF1u64, 0);
    let mut keys = Vec::new();
    for len in lengths.take_while(|&len| len <= tokens.len()) {
        for &token in &tokens[read..len] {
            hash = (hash ^ u64::from(token)).wrapping_mul(PRIME).rotate_left(29);
        }
        read = len;
        keys.push(PrefixKey { hash, len });
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(bytes: usize, drafter: bool) -> Saved {
        Saved { target: Snapshot::new((), bytes), drafter: drafter.then(|| Snapshot::new((), 0)) }
    }

    fn put(cache: &mut PrefixCache, prefix: &[u32], bytes: usize, drafter: bool) {
        if let Some(key) = cache.wanted(prefix, drafter) {
            cache.insert(key, prefix, saved(bytes - 4 * prefix.len(), drafter));
        }
    }

    fn found(cache: &mut PrefixCache, prompt: &[u32], drafts: bool) -> Option<usize> {
        cache.find(prompt, drafts).map(|(key, _)| key.len)
    }

    #[test]
    fn points_are_pages_the_next_turn_and_the_end() {
        let cache = PrefixCache::new(1, 100);
        assert_eq!(cache.points(350, 0, Some(270)), [100, 200, 270, 349]);
        assert_eq!(cache.points(401, 0, None), [100, 200, 300, 400]);
        assert_eq!(cache.points(372, 200, Some(999)), [300, 371]);
        assert_eq!(cache.points(64, 0, None), [] as [usize; 0]);
        assert_eq!(cache.points(1, 0, Some(1)), [] as [usize; 0]);
        assert_eq!(cache.points(65, 0, None), [64]);
    }

    #[test]
    fn the_longest_prefix_that_leaves_a_token_is_found() {
        let mut cache = PrefixCache::new(1000, 100);
        put(&mut cache, &[1, 2], 50, true);
        put(&mut cache, &[1, 2, 3, 4], 50, false);
        assert_eq!(found(&mut cache, &[1, 2, 3, 4, 5], false), Some(4));
        assert_eq!(
            found(&mut cache, &[1, 2, 3, 4, 5], true),
            Some(2),
            "the longer one lacks the drafter's context"
        );
        assert_eq!(found(&mut cache, &[1, 2, 3, 4], false), Some(2));
        assert_eq!(found(&mut cache, &[1, 2], false), None);
        assert_eq!(found(&mut cache, &[2, 1, 3], false), None);
        put(&mut cache, &[1, 2, 3, 4], 60, true);
        assert_eq!(found(&mut cache, &[1, 2, 3, 4, 5], true), Some(4));
        let stats = cache.stats();
        assert_eq!((stats.entries, stats.bytes, stats.hits, stats.reused_tokens), (2, 110, 4, 12));
    }

    #[test]
    fn the_least_recently_used_makes_room() {
        let mut cache = PrefixCache::new(100, 100);
        put(&mut cache, &[1], 40, false);
        put(&mut cache, &[2], 40, false);
        assert_eq!(found(&mut cache, &[1, 9], false), Some(1));
        put(&mut cache, &[3], 40, false);
        assert_eq!(found(&mut cache, &[2, 9], false), None);
        assert_eq!(found(&mut cache, &[1, 9], false), Some(1));
        put(&mut cache, &[4], 101, false);
        assert_eq!(found(&mut cache, &[4, 9], false), None, "larger than all the room");
        let stats = cache.stats();
        assert_eq!((stats.entries, stats.bytes, stats.evictions), (2, 80, 1));
    }
}
