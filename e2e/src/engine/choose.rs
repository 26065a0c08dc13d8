//! What stands between the target's logits and the token drawn from them: penalties, bias, the end of a thought, a
//! constraint.
//!
//! A [`Rules`] follows one text token by token. The accept walk asks it for the row of every node it visits and
//! advances it with the token picked there, so every row is changed by what lies on its own root path and by nothing
//! else: a drafted text is the undrafted one.

use std::collections::{HashMap, HashSet};

use super::{GenerateRequest, Penalties, Reasoning};
use crate::constrain::Grammar;
use crate::sampling::argmax;

/// The logit of a token that may not be chosen: finite, so that a row with such tokens still counts as finite, and far
/// enough below every other that its weight is 0.
pub(super) const FORBIDDEN: f32 = f32::MIN;

/// Why no token can be drawn from a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The target's logits are not finite.
    NonFinite,
    /// The rules leave no token, or cannot be followed.
    Rules(String),
}

/// A thought that has not ended.
#[derive(Clone, Debug)]
struct Thought {
    end: Vec<u32>,
    budget: Option<usize>,
    /// Its last tokens, fewer than `end` has.
    tail: Vec<u32>,
    tokens: usize,
}

impl Thought {
    /// Tokens of `end` that the last tokens are.
    fn matched(&self) -> usize {
        let most = self.tail.len().min(self.end.len() - 1);
        (0..=most).rev().find(|&len| self.tail.ends_with(&self.end[..len])).unwrap_or(0)
    }

    /// The only token allowed, once the budget is used up.
    fn forced(&self) -> Option<u32> {
        self.budget.is_some_and(|budget| self.tokens >= budget).then(|| self.end[self.matched()])
    }

    /// True when `token` ends the thought.
    fn push(&mut self, token: u32) -> bool {
        let ended = self.matched() + 1 == self.end.len() && self.end.last() == Some(&token);
        self.tokens += 1;
        self.tail.push(token);
        let extra = self.tail.len().saturating_sub(self.end.len());
        self.tail.drain(..extra);
        ended
    }
}

/// The rules of one text, after the tokens that it has so far.
#[derive(Default)]
pub(super) struct Rules {
    penalties: Penalties,
    /// Distinct prompt tokens, when a penalty looks at them.
    prompt: HashSet<u32>,
    /// Generated tokens and how often each came.
    counts: HashMap<u32, u32>,
    bias: Vec<(u32, f32)>,
    /// Tokens that end the text.
    ends: Vec<u32>,
    /// Tokens still to come before the text may end.
    needed: usize,
    thought: Option<Thought>,
    grammar: Option<Grammar>,
    row: Vec<f32>,
}

impl Rules {
    /// The rules of a request; `None` when it has none. `ends` are the tokens that end its text.
    pub fn new(request: &GenerateRequest, ends: Vec<u32>, grammar: Option<Grammar>) -> Option<Self> {
        let GenerateRequest { penalties, logit_bias, min_tokens, reasoning, .. } = request;
        if penalties.is_off()
            && logit_bias.is_empty()
            && *min_tokens == 0
            && reasoning.is_none()
            && grammar.is_none()
        {
            return None;
        }
        let prompt = match penalties.repetition == 1.0 {
            true => HashSet::new(),
            false => request.prompt.iter().copied().collect(),
        };
        let thought = |Reasoning { end, budget }: &Reasoning| Thought {
            end: end.clone(),
            budget: *budget,
            tail: Vec::new(),
            tokens: 0,
        };
        Some(Self {
            penalties: *penalties,
            prompt,
            bias: logit_bias.clone(),
            ends,
            needed: *min_tokens,
            thought: reasoning.as_ref().map(thought),
            grammar,
            ..Self::default()
        })
    }

    /// The row to draw the next token from, made of the target's own.
    pub fn row(&mut self, logits: &[f32]) -> Result<&[f32], Fault> {
        argmax(logits).ok_or(Fault::NonFinite)?;
        self.row.clear();
        if let Some(forced) = self.thought.as_ref().and_then(Thought::forced) {
            self.row.resize(logits.len(), FORBIDDEN);
            self.row[forced as usize] = logits[forced as usize];
            return Ok(&self.row);
        }
        self.row.extend_from_slice(logits);
        self.penalise();
        for &(id, bias) in &self.bias {
            let logit = &mut self.row[id as usize];
            *logit = if bias == f32::NEG_INFINITY { FORBIDDEN } else { *logit + bias };
        }
        let thinking = self.thought.is_some();
        if let Some(grammar) = self.grammar.as_mut().filter(|_| !thinking) {
            let mask = grammar.mask().map_err(Fault::Rules)?;
            for (id, logit) in self.row.iter_mut().enumerate() {
                if !mask.allows(id as u32) {
                    *logit = FORBIDDEN;
                }
            }
        }
        if self.needed > 0 || (thinking && self.grammar.is_some()) {
            self.forbid_the_end();
        }
        match self.row.iter().any(|&logit| logit > FORBIDDEN) {
            true => Ok(&self.row),
            false => Err(Fault::Rules("the constraint and the bias leave no token".into())),
        }
    }

    fn penalise(&mut self) {
        let Penalties { repetition, presence, frequency } = self.penalties;
        let generated = |id: &u32| !self.counts.contains_key(id);
        if repetition != 1.0 {
            for &id in self.counts.keys().chain(self.prompt.iter().filter(|id| generated(id))) {
                let logit = &mut self.row[id as usize];
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
        }
        if presence != 0.0 || frequency != 0.0 {
            for (&id, &count) in &self.counts {
                self.row[id as usize] -= presence + frequency * count as f32;
            }
        }
    }

    /// Forbids the tokens that end the text, unless nothing else is allowed.
    fn forbid_the_end(&mut self) {
        let open = |(id, &logit): (usize, &f32)| logit > FORBIDDEN && !self.ends.contains(&(id as u32));
        if self.row.iter().enumerate().any(open) {
            for &end in &self.ends {
                self.row[end as usize] = FORBIDDEN;
            }
        }
    }

    /// Takes in the token that was drawn.
    pub fn advance(&mut self, token: u32) -> Result<(), Fault> {
        *self.counts.entry(token).or_default() += 1;
        if let Some(thought) = &mut self.thought {
            if thought.push(token) {
                self.thought = None;
            }
            return Ok(());
        }
        self.needed = self.needed.saturating_sub(1);
        match &mut self.grammar {
            Some(grammar) => grammar.advance(token).map_err(Fault::Rules),
            None => Ok(()),
        }
    }

    /// The grammar that a draft from here has to obey.
    pub fn drafted_grammar(&self) -> Option<&Grammar> {
        self.grammar.as_ref().filter(|_| self.thought.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(change: impl FnOnce(&mut GenerateRequest)) -> Rules {
        let mut request = GenerateRequest::new(vec![0, 1], 9);
        change(&mut request);
        Rules::new(&request, vec![4], None).unwrap()
    }

    #[test]
    fn a_request_without_rules_has_none() {
        assert!(Rules::new(&GenerateRequest::new(vec![0], 1), vec![4], None).is_none());
    }

    #[test]
    fn penalties_follow_their_definitions() {
        let penalties = Penalties { repetition: 2.0, presence: 0.25, frequency: 0.5 };
        let mut rules = rules(|r| r.penalties = penalties);
        for token in [1, 2, 2] {
            rules.advance(token).unwrap();
        }
        // 0: prompt only; 1: prompt, generated once; 2: generated twice; 3: neither.
        assert_eq!(rules.row(&[-1.0, 3.0, -1.0, 5.0, 0.0]).unwrap(), [-2.0, 0.75, -3.25, 5.0, 0.0]);
    }

    #[test]
    fn bias_is_added_and_forbids() {
        let mut rules = rules(|r| r.logit_bias = vec![(1, 2.5), (0, f32::NEG_INFINITY)]);
        assert_eq!(rules.row(&[9.0, 1.0, 0.0, 0.0, 0.0]).unwrap(), [FORBIDDEN, 3.5, 0.0, 0.0, 0.0]);
        let all = (0..5).map(|id| (id, f32::NEG_INFINITY)).collect();
        assert!(matches!(rules_with(all).row(&[0.0; 5]), Err(Fault::Rules(_))));
    }

    fn rules_with(bias: Vec<(u32, f32)>) -> Rules {
        rules(|r| r.logit_bias = bias)
    }

    #[test]
    fn the_text_does_not_end_before_its_least_length() {
        let mut rules = rules(|r| r.min_tokens = 1);
        assert_eq!(rules.row(&[0.0, 0.0, 0.0, 0.0, 9.0]).unwrap()[4], FORBIDDEN);
        rules.advance(0).unwrap();
        assert_eq!(rules.row(&[0.0, 0.0, 0.0, 0.0, 9.0]).unwrap()[4], 9.0);
    }

    #[test]
    fn a_thought_over_its_budget_is_ended_token_by_token() {
        let row = [5.0, 4.0, 3.0, 2.0, 1.0];
        let only = |rules: &mut Rules| {
            let row = rules.row(&row).unwrap();
            (0..5).filter(|&id| row[id] > FORBIDDEN).collect::<Vec<_>>()
        };
        let mut rules = rules(|r| r.reasoning = Some(Reasoning { end: vec![2, 3], budget: Some(2) }));
        for token in [0, 1] {
            assert_eq!(only(&mut rules).len(), 5);
            rules.advance(token).unwrap();
        }
        assert_eq!(only(&mut rules), [2]);
        rules.advance(2).unwrap();
        assert_eq!(only(&mut rules), [3]);
        rules.advance(3).unwrap();
        assert_eq!(only(&mut rules).len(), 5);
        assert!(rules.thought.is_none());
    }

    #[test]
    fn non_finite_logits_are_not_hidden_by_a_rule() {
        let mut rules = rules_with(vec![(1, f32::NEG_INFINITY)]);
        assert_eq!(rules.row(&[0.0, f32::NAN, 0.0, 0.0, 0.0]).map(<[f32]>::to_vec), Err(Fault::NonFinite));
    }
}
