//! Stop strings over incrementally decoded text.

/// Finds stop strings in a growing text and holds back whatever may still become one.
///
/// Of several matches the one that completes earliest wins; of those that complete at the same character the
/// longest. Text before the match is released, the match and everything after it never is.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    matched: bool,
}

impl StopMatcher {
    /// A matcher for non-empty `stops`.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new(), matched: false }
    }

    /// True once a stop string has completed; nothing is released from then on.
    pub fn matched(&self) -> bool {
        self.matched
    }

    /// Takes new text in, gives back what can no longer be part of a stop string.
    pub fn push(&mut self, text: &str) -> String {
        if self.matched {
            return String::new();
        }
        self.held.push_str(text);
        if let Some(start) = self.first_match() {
            self.matched = true;
            self.held.truncate(start);
            return std::mem::take(&mut self.held);
        }
        let tail = self.held.split_off(self.held.len() - self.open_tail());
        std::mem::replace(&mut self.held, tail)
    }

    /// Releases what is held: the text has ended, no stop string can complete.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the match that completes earliest starts.
    fn first_match(&self) -> Option<usize> {
        let found = |stop: &String| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start));
        self.stops.iter().filter_map(found).min().map(|(_, start)| start)
    }

    /// Bytes at the end of the held text that begin a stop string, the most that any does.
    fn open_tail(&self) -> usize {
        let held = self.held.as_bytes();
        let open = |stop: &String| {
            let longest = held.len().min(stop.len() - 1);
            (1..=longest).rev().find(|&len| stop.as_bytes()[..len] == held[held.len() - len..])
        };
        self.stops.iter().filter_map(open).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut out: Vec<String> = pieces.iter().map(|piece| matcher.push(piece)).collect();
        out.push(matcher.finish());
        (out, matcher.matched())
    }

    #[test]
    fn a_forming_stop_string_is_held_and_cut() {
        assert_eq!(
            run(&["\nUser:"], &["hi\nUser", ":", "more"]),
            (vec!["hi".into(), "".into(), "".into(), "".into()], true)
        );
    }

    #[test]
    fn a_stop_string_that_cannot_complete_is_released() {
        assert_eq!(run(&["\nUser:"], &["\nUs", "age"]).0, ["", "\nUsage", ""]);
        assert_eq!(run(&["\nUser:"], &["a\nUs"]), (vec!["a".into(), "\nUs".into()], false));
    }

    #[test]
    fn the_stop_that_completes_earliest_wins_not_the_first_listed() {
        assert_eq!(run(&["world", "lo"], &["hello world"]).0[0], "hel");
        // "cd" starts later than "bcde" but completes before it.
        assert_eq!(run(&["bcde", "cd"], &["abcde"]).0[0], "ab");
        assert_eq!(run(&["b", "ab"], &["xab"]).0[0], "x");
    }

    #[test]
    fn overlapping_beginnings_are_followed() {
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]).0, ["", "", "a", "", ""]);
        assert_eq!(run(&["äß"], &["xä", "ä", "ß"]).0, ["x", "ä", "", ""]);
    }

    proptest! {
        /// However the text is cut into pieces, what comes out is the text before its earliest-completing stop.
        #[test]
        fn pieces_do_not_matter(text in "[ab\u{e4}]{0,24}", stops in prop::collection::vec("[ab\u{e4}]{1,4}", 0..3), step in 1usize..4) {
            let chars: Vec<char> = text.chars().collect();
            let mut matcher = StopMatcher::new(stops.clone());
            let mut out = String::new();
            for piece in chars.chunks(step) {
                out.push_str(&matcher.push(&piece.iter().collect::<String>()));
            }
            out.push_str(&matcher.finish());
            let cut = (0..=text.len())
                .filter(|&end| text.is_char_boundary(end))
                .find_map(|end| stops.iter().filter(|s| text[..end].ends_with(s.as_str())).map(|s| end - s.len()).min());
            prop_assert_eq!(out, &text[..cut.unwrap_or(text.len())]);
        }
    }
}
