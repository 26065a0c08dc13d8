//! Parts an answer whose prompt opened `<think>` into reasoning and content.

/// What ends a thought.
pub const END: &str = "</think>";

/// A piece of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// What stands before `</think>`.
    pub reasoning: String,
    /// What stands after it.
    pub content: String,
}

/// Parts streamed text at the first `</think>`; the newlines around the marker belong to neither part.
#[derive(Clone, Debug)]
pub struct ReasoningSplit {
    state: State,
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Reasoning,
    AfterMarker,
    Content,
}

impl ReasoningSplit {
    /// A split for an answer that starts inside `<think>`, or one that is all content.
    pub fn new(thinking: bool) -> Self {
        Self { state: if thinking { State::Reasoning } else { State::Content }, held: String::new() }
    }

    /// Takes the next text and returns what is decided.
    pub fn push(&mut self, text: &str) -> Parts {
        let mut parts = Parts::default();
        match self.state {
            State::Content => parts.content.push_str(text),
            State::AfterMarker => self.after_marker(text, &mut parts),
            State::Reasoning => {
                self.held.push_str(text);
                if let Some(at) = self.held.find(END) {
                    let rest = self.held.split_off(at + END.len());
                    self.held.truncate(at);
                    parts.reasoning.push_str(self.held.trim_end_matches('\n'));
                    self.held.clear();
                    self.state = State::AfterMarker;
                    self.after_marker(&rest, &mut parts);
                } else {
                    let keep = undecided(&self.held);
                    let rest = self.held.split_off(self.held.len() - keep);
                    parts.reasoning = std::mem::replace(&mut self.held, rest);
                }
            }
        }
        parts
    }

    /// What was held back when the text ended.
    pub fn finish(&mut self) -> Parts {
        Parts { reasoning: std::mem::take(&mut self.held), content: String::new() }
    }

    fn after_marker(&mut self, text: &str, parts: &mut Parts) {
        let content = text.trim_start_matches('\n');
        if !content.is_empty() {
            self.state = State::Content;
            parts.content.push_str(content);
        }
    }
}

/// Counts the tokens of a thought, those that its end stands in included.
#[derive(Clone, Debug, Default)]
pub struct ThoughtTokens {
    /// The last text of a thought that has not ended.
    open: Option<String>,
    count: usize,
}

impl ThoughtTokens {
    /// A count for an answer that starts inside `<think>`, or one that stays 0.
    pub fn new(thinking: bool) -> Self {
        Self { open: thinking.then(String::new), count: 0 }
    }

    /// Takes the next token's text, which is asked for only while the thought is open.
    pub fn push(&mut self, text: impl FnOnce() -> String) {
        let Some(open) = &mut self.open else { return };
        self.count += 1;
        open.push_str(&text());
        if open.contains(END) {
            self.open = None;
        } else {
            open.drain(..open.ceil_char_boundary(open.len().saturating_sub(END.len())));
        }
    }

    /// Tokens so far.
    pub fn count(&self) -> usize {
        self.count
    }
}

/// Bytes at the end of `text` that may belong to newlines and a marker that are not complete.
fn undecided(text: &str) -> usize {
    let marker = (0..END.len()).rev().find(|&len| text.ends_with(&END[..len])).unwrap_or(0);
    let before = &text[..text.len() - marker];
    marker + before.len() - before.trim_end_matches('\n').len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(thinking: bool, chunks: &[&str]) -> (String, String) {
        let mut split = ReasoningSplit::new(thinking);
        let mut all = Parts::default();
        for parts in chunks.iter().map(|chunk| split.push(chunk)).collect::<Vec<_>>() {
            all.reasoning.push_str(&parts.reasoning);
            all.content.push_str(&parts.content);
        }
        let rest = split.finish();
        (all.reasoning + &rest.reasoning, all.content + &rest.content)
    }

    #[test]
    fn text_is_parted_at_the_marker_however_it_is_cut() {
        let text = "abc</think>42";
        for first in 0..=text.len() {
            for second in first..=text.len() {
                let chunks = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(split(true, &chunks), ("abc".into(), "42".into()), "{chunks:?}");
            }
        }
    }

    #[test]
    fn newlines_around_the_marker_belong_to_neither_part() {
        let text = "a\n\nb\n</think>\n\n4\n2\n";
        for cut in 0..=text.len() {
            let parts = split(true, &[&text[..cut], &text[cut..]]);
            assert_eq!(parts, ("a\n\nb".into(), "4\n2\n".into()), "{cut}");
        }
    }

    #[test]
    fn without_a_marker_everything_is_reasoning_and_without_think_everything_is_content() {
        assert_eq!(split(true, &["a</thi", "s>\n"]), ("a</this>\n".into(), String::new()));
        assert_eq!(split(true, &["a</think"]), ("a</think".into(), String::new()));
        assert_eq!(split(false, &["a</think>b"]), (String::new(), "a</think>b".into()));
        assert_eq!(split(true, &["a</think>b</think>c"]), ("a".into(), "b</think>c".into()));
    }

    #[test]
    fn a_thoughts_tokens_are_counted_up_to_the_one_that_ends_it() {
        let count = |thinking, tokens: &[&str]| {
            let mut thought = ThoughtTokens::new(thinking);
            tokens.iter().for_each(|&token| thought.push(|| token.to_owned()));
            thought.count()
        };
        assert_eq!(count(true, &["abc", "</think>", "42"]), 2);
        assert_eq!(count(true, &["a", "bc</th", "ink>4", "2", "</think>"]), 3);
        assert_eq!(count(true, &["äöü", "äöü</", "th", "i", "nk", ">", "x"]), 6);
        assert_eq!(count(true, &["a", "</thin", "x", "k>"]), 4);
        assert_eq!(count(true, &[]), 0);
        assert_eq!(count(false, &["a", "</think>", "b"]), 0);
    }

    #[test]
    fn decided_text_is_not_held_back() {
        let mut split = ReasoningSplit::new(true);
        assert_eq!(split.push("ab<").reasoning, "ab");
        assert_eq!(split.push("c").reasoning, "<c");
    }
}
