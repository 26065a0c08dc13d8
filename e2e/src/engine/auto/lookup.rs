//! Drafts that cost nothing: what followed the longest earlier occurrence of a stream's last tokens in its own prompt
//! and text.

use std::collections::HashMap;

/// Tokens of a match that are compared at most.
const LONGEST: usize = 16;
/// Earlier occurrences of the last token that are looked at, newest first.
const OCCURRENCES: usize = 256;
/// Longest chain that is proposed.
const MOST: usize = 24;
/// Shortest match of every class of matches: longer ones are continued more surely.
const CLASSES: [usize; 7] = [1, 2, 3, 4, 6, 8, 12];
/// How often the token after a match of each class is right where nothing was observed yet.
const GUESS: [f64; 7] = [0.35, 0.4, 0.55, 0.65, 0.7, 0.85, 0.95];
/// Trials that the engine's first guess, and then the engine's statistic for a new stream, count for.
const PRIOR: f64 = 4.0;
/// What one round keeps of the rounds before it.
const KEEP: f64 = 0.98;

/// A stream's tokens, prompt first, with the places of each token.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct History {
    tokens: Vec<u32>,
    /// One more than the place of the same token before each place; 0 for none.
    earlier: Vec<u32>,
    /// One more than the last indexed place of each token.
    last: HashMap<u32, u32>,
}

impl History {
    /// The history of a stream that starts with `prompt`.
    pub fn new(prompt: &[u32]) -> Self {
        Self { tokens: prompt.to_vec(), ..Self::default() }
    }

    /// Appends emitted tokens.
    pub fn extend(&mut self, tokens: impl Iterator<Item = u32>) {
        self.tokens.extend(tokens);
    }

    fn index(&mut self) {
        for place in self.earlier.len()..self.tokens.len() {
            let before = self.last.insert(self.tokens[place], place as u32 + 1);
            self.earlier.push(before.unwrap_or(0));
        }
    }

    /// The longest match of the end of the text with an earlier place, the newest of equals: its length and the place
    /// after it.
    fn longest(&mut self) -> Option<(usize, usize)> {
        self.index();
        let end = self.tokens.len();
        let (mut best, mut place) = (None, *self.earlier.last()? as usize);
        for _ in 0..OCCURRENCES {
            if place == 0 {
                break;
            }
            let pairs = self.tokens[..place].iter().rev().zip(self.tokens[..end].iter().rev());
            let length = pairs.take(LONGEST).take_while(|(a, b)| a == b).count();
            if best.is_none_or(|(longest, _)| length > longest) {
                best = Some((length, place));
            }
            if length == LONGEST {
                break;
            }
            place = self.earlier[place - 1] as usize;
        }
        best
    }

    /// At most `most` tokens that followed the longest match, and its length. A text that repeats itself up to its end
    /// is taken to go on so.
    fn propose(&mut self, most: usize) -> Option<(usize, Vec<u32>)> {
        let (length, next) = self.longest()?;
        let period = &self.tokens[next..];
        let tokens: Vec<u32> = period.iter().cycle().take(most.min(MOST)).copied().collect();
        (!tokens.is_empty()).then_some((length, tokens))
    }
}

/// A proposed chain.
#[derive(Clone, Debug)]
pub(in super::super) struct Lookup {
    /// Length of the match before the first token.
    pub matched: usize,
    /// Proposed tokens with ln of the estimated probability that each is right once those before it are.
    pub tokens: Vec<(u32, f64)>,
    /// Sum of the tokens' probabilities of being accepted.
    pub gain: f64,
}

impl Lookup {
    /// Its first tokens, as many as the largest of `sizes` that it has.
    pub(super) fn cut(mut self, sizes: &[usize]) -> Option<Self> {
        let nodes = sizes.iter().copied().filter(|&size| size <= self.tokens.len()).max()?;
        self.tokens.truncate(nodes);
        let mut reached = 0.0f64;
        let gains = self.tokens.iter().map(|token| {
            reached += token.1;
            reached.exp()
        });
        self.gain = gains.sum();
        Some(self)
    }
}

fn class(matched: usize) -> usize {
    CLASSES.partition_point(|&shortest| shortest <= matched.max(1)) - 1
}

/// How often the token after a match was right, by the match's length.
#[derive(Clone, Debug, Default)]
pub(super) struct Hits([(f64, f64); CLASSES.len()]);

impl Hits {
    /// Takes in that of `proposed` tokens after a match of `matched` the first `accepted` were right.
    pub fn observe(&mut self, matched: usize, proposed: usize, accepted: usize) {
        for depth in 0..proposed.min(accepted + 1) {
            let (right, trials) = &mut self.0[class(matched + depth)];
            *right = *right * KEEP + f64::from(u8::from(depth < accepted));
            *trials = *trials * KEEP + 1.0;
        }
    }

    fn rate(&self, class: usize, prior: f64) -> f64 {
        let (right, trials) = self.0[class];
        (right + PRIOR * prior) / (trials + PRIOR)
    }

    /// The probability that the token after a match is right: this stream's rate, leaning on the engine's (`shared`)
    /// where its trials are few.
    fn probability(&self, shared: &Self, matched: usize) -> f64 {
        let class = class(matched);
        self.rate(class, shared.rate(class, GUESS[class]))
    }

    /// The chain of at most `most` tokens that brings most `tokens - cost(nodes)`; `None` when no chain brings more than
    /// it costs.
    pub fn propose(
        &self,
        shared: &Self,
        history: &mut History,
        most: usize,
        cost: impl Fn(usize) -> f64,
    ) -> Option<Lookup> {
        let (matched, tokens) = history.propose(most)?;
        let (mut reached, mut gain, mut best) = (1.0, 0.0, (0.0, 0, 0.0));
        let mut chain = Vec::with_capacity(tokens.len());
        for (depth, token) in tokens.into_iter().enumerate() {
            let right = self.probability(shared, matched + depth);
            reached *= right;
            gain += reached;
            chain.push((token, right.ln()));
            let net = gain - cost(depth + 1);
            if net > best.0 {
                best = (net, depth + 1, gain);
            }
        }
        chain.truncate(best.1);
        (best.1 > 0).then_some(Lookup { matched, tokens: chain, gain: best.2 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_match_is_continued() {
        let mut history = History::new(&[1, 2, 3, 9, 2, 3, 7, 1, 2, 3]);
        assert_eq!(history.propose(3), Some((3, vec![9, 2, 3])));
        history.extend([7].into_iter());
        assert_eq!(history.propose(2), Some((3, vec![1, 2])));
        history.extend([5].into_iter());
        assert_eq!(history.propose(2), None);
        assert_eq!(History::default().propose(2), None);
    }

    #[test]
    fn of_equal_matches_the_newest_is_continued() {
        let mut history = History::new(&[4, 1, 5, 4, 2, 6, 4]);
        assert_eq!(history.propose(1), Some((1, vec![2])));
    }

    #[test]
    fn a_repetition_is_taken_to_go_on() {
        let mut history = History::new(&[8, 1, 2, 1, 2]);
        assert_eq!(history.propose(5), Some((2, vec![1, 2, 1, 2, 1])));
        assert_eq!(history.propose(100).unwrap().1.len(), MOST);
    }

    #[test]
    fn chains_are_as_long_as_they_pay() {
        let mut history = History::new(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]);
        let (hits, shared) = (Hits::default(), Hits::default());
        let short = hits.propose(&shared, &mut history, 8, |nodes| 0.3 * nodes as f64).unwrap();
        assert_eq!(short.tokens.iter().map(|token| token.0).collect::<Vec<_>>(), [2]);
        assert!(hits.propose(&shared, &mut history, 8, |nodes| 0.6 * nodes as f64).is_none());
        let mut sure = Hits::default();
        (0..40).for_each(|_| sure.observe(1, 8, 8));
        let long = sure.propose(&shared, &mut history, 8, |nodes| 0.3 * nodes as f64).unwrap();
        assert!(long.tokens.len() == 8 && long.gain > 5.0, "{long:?}");
    }

    #[test]
    fn a_chain_is_cut_to_a_size_that_comes_again() {
        let lookup = |nodes: usize| Lookup { matched: 2, tokens: vec![(7, 0.5f64.ln()); nodes], gain: 9.0 };
        let cut = lookup(6).cut(&[1, 3, 7]).unwrap();
        assert!(cut.tokens.len() == 3 && (cut.gain - 0.875).abs() < 1e-12, "{cut:?}");
        assert!(lookup(2).cut(&[3]).is_none() && lookup(9).cut(&[1, 9, 3]).unwrap().tokens.len() == 9);
    }

    #[test]
    fn a_new_stream_leans_on_the_others() {
        let (own, mut shared) = (Hits::default(), Hits::default());
        let before = own.probability(&shared, 5);
        (0..40).for_each(|_| shared.observe(5, 1, 0));
        assert!(own.probability(&shared, 5) < before / 2.0);
        assert_eq!(own.probability(&shared, 1), GUESS[0]);
    }
}
