//! `canopy tree`: one round's draft tree as text.

use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use canopy_e2e::loader::load_tokenizer;
use canopy_e2e::target::{LogitRows, Target};
use canopy_e2e::tokenizer::{ChatMessage, Tokenizer};
use canopy_e2e::tree::{BuildOptions, CandidateTree, Marginals, chain_from, ddtree_from, expected_tokens};

use crate::pair::{Pair, PairArgs};

const EXAMPLE: &str = "\
The first line is the root, the last token that is certain. Every other line is a drafted node: its token, the
drafter's probability of that token at its depth, and of the whole path to it. A * marks the accepted path; the
target's own next token follows the tree.

Examples:
  canopy tree \"def add(a, b):\"
  canopy tree --chat --budget 31 --round 2 \"Write a function that reverses a list.\"";

/// Prints one round's draft tree with probabilities and the accepted path
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    #[command(flatten)]
    pair: PairArgs,
    /// The text to continue
    prompt: String,
    /// Wraps the prompt in the model's chat template
    #[arg(long)]
    chat: bool,
    /// Most nodes of the tree besides the root
    #[arg(long, default_value_t = 16, value_name = "NODES")]
    budget: u8,
    /// Drafts the drafter's best chain instead of a tree
    #[arg(long)]
    chain: bool,
    /// Which round after the prompt to print
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..), value_name = "N")]
    round: u16,
}

/// One greedy round.
struct Round {
    tree: CandidateTree,
    path: Vec<usize>,
    bonus: u32,
    start: usize,
}

pub fn run(args: Args) -> Result<()> {
    let mut pair = args.pair.load()?;
    let tokenizer = load_tokenizer(&args.pair.target_files()?, pair.target.config())?;
    let text = match args.chat {
        true => {
            tokenizer.chat_prompt(&[ChatMessage { role: "user".into(), content: args.prompt.clone() }])?
        }
        false => args.prompt.clone(),
    };
    let ids = tokenizer.encode(&text)?;
    ensure!(!ids.is_empty(), "PROMPT: expected at least one token, got an empty text");
    pair.check_length("PROMPT", ids.len(), 1)?;
    let (logits, _) = pair.read(&ids)?;
    let mut root = argmax(&logits.context("an empty prompt")?)?[0];
    for _ in 1..args.round {
        root = round(&mut pair, root, &args)?.bonus;
    }
    let text = render(&round(&mut pair, root, &args)?, &tokenizer);
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// Drafts, builds, verifies, accepts and commits.
fn round(pair: &mut Pair, root: u32, args: &Args) -> Result<Round> {
    let start = pair.target.committed(0);
    let logits = pair.draft(root)?;
    let room = pair.target.context_len() - start;
    ensure!(room > 0, "--round: expected a round within the context of {start} tokens, got {}", args.round);
    let depths = logits.dim(0)?.min(room - 1);
    let options = BuildOptions { budget: args.budget.into(), ..Default::default() };
    let marginals = Marginals::from_tensor(&logits.narrow(0, 0, depths)?, options)?;
    let tree = match args.chain {
        true => chain_from(&marginals, root, options)?,
        false => ddtree_from(&marginals, root, options)?,
    };
    let (logits, features) = pair.verify(tree.tokens(), tree.tree().clone(), LogitRows::All)?;
    let posterior = argmax(&logits)?;
    let mut path = vec![0];
    let mut last = 0;
    while let Some(next) = tree.child(last, posterior[last]) {
        path.push(next);
        last = next;
    }
    pair.commit(&path, &features)?;
    Ok(Round { tree, path, bonus: posterior[last], start })
}

/// The best token of every row, the lower id of equal ones.
fn argmax(logits: &Tensor) -> Result<Vec<u32>> {
    Ok(logits.argmax(1)?.to_vec1()?)
}

/// The lines of a printed tree: the drawn node on the left, its probabilities in per cent on the right.
struct Drawing<'a> {
    round: &'a Round,
    tokenizer: &'a Tokenizer,
    children: Vec<Vec<usize>>,
    lines: Vec<(String, String)>,
}

impl Drawing<'_> {
    fn text(&self, id: u32) -> String {
        format!("{:?}", self.tokenizer.token_text(id))
    }

    fn node(&mut self, node: usize, before: &str) {
        let tree = &self.round.tree;
        let mark = if self.round.path.contains(&node) { "*" } else { " " };
        let left = format!("{mark} {before}{}", self.text(tree.tokens()[node]));
        let joint = 100.0 * tree.joint_log_probs()[node].exp();
        let right = match node {
            0 => "  token     path".into(),
            _ => format!("{:5.1} %  {joint:5.1} %", 100.0 * tree.prob(node)),
        };
        self.lines.push((left, right));
    }

    /// The subtrees of `node`'s children, `indent` before every line.
    fn below(&mut self, node: usize, indent: &str) {
        let children = self.children[node].clone();
        for (index, &child) in children.iter().enumerate() {
            let (branch, rail) =
                if index + 1 == children.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            self.node(child, &format!("{indent}{branch}"));
            self.below(child, &format!("{indent}{rail}"));
        }
    }
}

fn render(round: &Round, tokenizer: &Tokenizer) -> String {
    let children = round.tree.tree().children();
    let mut drawing = Drawing { round, tokenizer, children, lines: Vec::new() };
    drawing.node(0, "");
    drawing.below(0, "");
    let width = drawing.lines.iter().map(|(left, _)| left.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for (left, right) in &drawing.lines {
        let pad = width - left.chars().count();
        out.push_str(&format!("{left}{}  {right}\n", " ".repeat(pad)));
    }
    let accepted = round.path[1..].iter().map(|&node| drawing.text(round.tree.tokens()[node]));
    let accepted: Vec<String> = accepted.collect();
    out.push_str(&format!(
        "position {}: {} drafted nodes, {} accepted: {}; then the target's own {}\n",
        round.start,
        round.tree.budget(),
        accepted.len(),
        if accepted.is_empty() { "none".into() } else { accepted.join(" ") },
        drawing.text(round.bonus)
    ));
    let expected = expected_tokens(&round.tree, &[]).pop().unwrap_or(1.0);
    let tokens = round.path.len();
    out.push_str(&format!(
        "tokens gained: {tokens}; expected by the drafter's probabilities: {expected:.1}\n"
    ));
    out
}
