//! The walk against its definition over random trees, tokens and stated models; who may fail whom; refusals.

use super::cpu::forward;
use super::{BEST_WORDS, Input, Output, Row, Stated, oracle, row_words, stated_node};
use crate::test_support::refusal;
use crate::tree::SplitMix64;
use crate::{DraftTree, top_tokens};

/// Packed trees with tokens, best tokens, and what a model wants.
#[derive(Clone)]
struct Case {
    parents: Vec<i32>,
    tokens: Vec<u32>,
    cu_nodes: Vec<i32>,
    best: Vec<u32>,
    nodes: Vec<u32>,
    wanted: Vec<i32>,
    most: usize,
}

struct Walked {
    words: Vec<u32>,
    rows: Vec<i32>,
    cu_rows: Vec<i32>,
}

impl Case {
    /// Few tokens, so that walks go deep; siblings carry different ones, as a builder's do.
    fn new(trees: usize, seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let most = 1 + random.below(12);
        let mut case = Self {
            parents: Vec::new(),
            tokens: Vec::new(),
            cu_nodes: vec![0],
            best: Vec::new(),
            nodes: Vec::new(),
            wanted: (0..trees * 2 * most).map(|_| random.below(4) as i32 - 1).collect(),
            most,
        };
        for _ in 0..trees {
            let tree = DraftTree::random(1 + random.below(70), random.next_u64()).unwrap();
            let mut siblings = vec![0u32; tree.len()];
            for node in 0..tree.len() {
                let rank = tree.parent(node).map_or(0, |parent| {
                    siblings[parent] += 1;
                    siblings[parent] - 1
                });
                case.tokens.push(7 + rank);
                case.nodes.push(stated_node(rank, tree.depths()[node]));
                let flags = if random.below(12) == 0 { top_tokens::FORBIDDEN } else { top_tokens::FINITE };
                case.best.extend([flags, 9, 9, 7 + random.below(3) as u32]);
            }
            case.parents.extend_from_slice(tree.parents());
            case.cu_nodes.push(case.parents.len() as i32);
        }
        case
    }

    fn input(&self, stated: bool) -> Input<'_> {
        Input {
            parents: &self.parents,
            tokens: &self.tokens,
            cu_nodes: &self.cu_nodes,
            best: &self.best,
            stated: stated.then_some(Stated { nodes: &self.nodes, wanted: &self.wanted }),
            most: self.most,
        }
    }

    fn walk(&self, stated: bool) -> Walked {
        let trees = self.cu_nodes.len() - 1;
        let mut words = vec![u32::MAX; trees * row_words(self.most)];
        let (mut rows, mut cu_rows) = (vec![i32::MAX; self.parents.len()], vec![i32::MAX; trees + 1]);
        let out = Output { words: &mut words, rows: &mut rows, cu_rows: &mut cu_rows };
        forward(self.input(stated), out).unwrap();
        Walked { words, rows, cu_rows }
    }
}

#[test]
fn walks_equal_the_oracle() {
    let (mut deepest, mut failed) = (0, 0);
    for seed in 0..3000 {
        let case = Case::new(1 + seed as usize % 5, seed);
        for stated in [false, true] {
            let got = case.walk(stated);
            let (mut rows, mut cu_rows) = (Vec::new(), vec![0]);
            for (b, words) in got.words.chunks(row_words(case.most)).enumerate() {
                let want = oracle::walk(&case.input(stated), b);
                assert_eq!(Row::new(words).unwrap(), want, "seed {seed}, tree {b}");
                deepest = deepest.max(want.path.len());
                match want.failed {
                    true => failed += 1,
                    false => rows.extend(want.path.iter().map(|&node| case.cu_nodes[b] + node as i32)),
                }
                cu_rows.push(rows.len() as i32);
            }
            assert_eq!(got.cu_rows, cu_rows);
            assert_eq!(got.rows[..rows.len()], rows);
            assert!(got.rows[rows.len()..].iter().all(|&row| row == -1));
        }
    }
    assert!(deepest > 5 && failed > 500, "{deepest} deep, {failed} failed: the cases show little");
}

#[test]
fn trees_alone_equal_trees_together() {
    let case = Case::new(6, 11);
    let (all, words) = (case.walk(true), row_words(case.most));
    for b in 0..6 {
        let (first, end) = (case.cu_nodes[b] as usize, case.cu_nodes[b + 1] as usize);
        let alone = Case {
            parents: case.parents[first..end].to_vec(),
            tokens: case.tokens[first..end].to_vec(),
            cu_nodes: vec![0, (end - first) as i32],
            best: case.best[first * BEST_WORDS..end * BEST_WORDS].to_vec(),
            nodes: case.nodes[first..end].to_vec(),
            wanted: case.wanted[b * 2 * case.most..(b + 1) * 2 * case.most].to_vec(),
            most: case.most,
        };
        assert_eq!(alone.walk(true).words, all.words[b * words..(b + 1) * words]);
    }
}

#[test]
fn only_visited_rows_can_fail() {
    let mut case = Case::new(3, 5);
    case.best.chunks_mut(BEST_WORDS).for_each(|row| row[0] = top_tokens::FINITE);
    let clean = case.walk(false);
    let visited = |walked: &Walked, row: i32| walked.rows[..walked.cu_rows[3] as usize].contains(&row);
    for row in 0..case.parents.len() {
        let mut bad = case.clone();
        bad.best[row * BEST_WORDS] = top_tokens::NO_DISTRIBUTION;
        let (walked, words) = (bad.walk(false), row_words(case.most));
        let tree = case.cu_nodes.iter().rposition(|&first| first as usize <= row).unwrap();
        for b in 0..3 {
            let of = |walked: &Walked| walked.words[b * words..(b + 1) * words].to_vec();
            let fails = b == tree && visited(&clean, row as i32);
            assert_eq!(of(&walked)[1] == 1, fails, "row {row}, tree {b}");
            assert_eq!(walked.cu_rows[b + 1] == walked.cu_rows[b], fails);
            assert!(fails || of(&walked) == of(&clean));
        }
    }
}

#[test]
fn refusals_name_the_argument() {
    let case = Case::new(2, 3);
    let (trees, rows) = (2, case.parents.len());
    let said = |change: fn(&mut Input<'_>), words: usize| {
        let (mut words, mut out_rows, mut cu_rows) = (vec![0; words], vec![0; rows], vec![0; trees + 1]);
        let mut input = case.input(true);
        change(&mut input);
        refusal(forward(input, Output { words: &mut words, rows: &mut out_rows, cu_rows: &mut cu_rows }))
    };
    let words = trees * row_words(case.most);
    assert_eq!(said(|input| input.most = 0, words), "accept-walk: most, expected: 1 to 256, got: 0");
    assert_eq!(
        said(|input| input.cu_nodes = &[0, 5, 5], words),
        "accept-walk: cu_nodes, expected: rising from 0 by 1 to 256 nodes a tree, got: [0, 5, 5]"
    );
    assert_eq!(
        said(|input| input.cu_nodes = &[], words),
        "accept-walk: cu_nodes, expected: at least one entry, got: none"
    );
    for (name, text) in [
        ("parents", said(|input| input.parents = &[-1], words)),
        ("tokens", said(|input| input.tokens = &[1], words)),
        ("best", said(|input| input.best = &[1], words)),
        ("stated nodes", said(|input| input.stated = Some(Stated { nodes: &[], wanted: &[] }), words)),
        ("words", said(|_| (), words - 1)),
    ] {
        assert!(text.starts_with(&format!("accept-walk: {name}, expected: [")), "{text}");
    }
    assert!(refusal(Row::new(&[1, 0, 3])).starts_with("accept-walk: row, expected: 2 + 2 most words"));
    assert!(refusal(Row::new(&[2, 0, 3, 3])).starts_with("accept-walk: row"));
}
