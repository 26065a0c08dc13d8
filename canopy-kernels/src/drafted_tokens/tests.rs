//! Tokens against the rows that they come from; refusals.

use super::cpu::forward;
use super::source;
use crate::test_support::{refusal, values};
use crate::top_tokens::{self, Row, row_words};

#[test]
fn tokens_are_those_of_their_sources() {
    let (vocab, k) = (60, 4);
    let logits = values(9, 5 * vocab, 3.0);
    let mut best = vec![0; 5 * row_words(k)];
    top_tokens::cpu::forward(vocab, k, &logits, &mut best).unwrap();
    let places: Vec<_> = (0..5).flat_map(|row| (0..k).map(move |rank| (row, rank))).collect();
    let mut sources: Vec<i32> = places.iter().map(|&(row, rank)| source(row, rank, k)).collect();
    sources.insert(0, -1);
    sources.push(-1);
    let mut tokens = vec![900; sources.len()];
    forward(k, &best, &sources, &mut tokens).unwrap();
    assert_eq!((tokens[0], tokens[tokens.len() - 1]), (900, 900));
    for (&(row, rank), &token) in places.iter().zip(&tokens[1..]) {
        let words = &best[row * row_words(k)..][..row_words(k)];
        assert_eq!(token, Row::new(words).unwrap().best().nth(rank).unwrap().0, "row {row}, rank {rank}");
    }
}

#[test]
fn refusals_name_the_argument() {
    let said = |k, best: usize, sources: &[i32], tokens: usize| {
        refusal(forward(k, &vec![0; best], sources, &mut vec![0; tokens]))
    };
    assert_eq!(said(0, 4, &[], 0), "drafted-tokens: k, expected: at least 1, got: 0");
    assert_eq!(said(1, 5, &[0], 1), "drafted-tokens: best, expected: [1, 4], got: [5]");
    assert_eq!(said(1, 4, &[0], 2), "drafted-tokens: tokens, expected: [1], got: [2]");
    let outside = "drafted-tokens: sources, expected: -1 or below 2, the candidates of 2 rows, got: ";
    assert_eq!(said(1, 8, &[0, 2], 2), format!("{outside}2"));
    assert_eq!(said(1, 8, &[-2], 1), format!("{outside}-2"));
}
