//! Constrained decoding: which tokens may follow, so that the text stays in a language.
//!
//! A [`Grammar`] follows one text. Its mask is laid over the target's own logits of a position before the token is
//! drawn, and a draft tree loses the nodes that the language refuses before it is verified. Both ask the state at
//! the node's own root path, so a drafted text is the undrafted one. The languages are llguidance's: JSON, JSON Schema
//! and a dialect of Lark.
//!
//! Compiling may take as long as hundreds of rounds: a [`Compiler`] does it on any thread, so that no round waits for it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::engine::{Constraint, TokenText};
use crate::tree::CandidateTree;
use crate::{Error, Result};

/// White space between two parts of JSON: a space, or a new line with its indentation. With more of it a small model
/// fills its whole budget of tokens.
const WHITE_SPACE: &str = r"(\x20|\n[\x20\t]{0,12})";
/// Most characters of a message about a bad grammar.
const MESSAGE: usize = 400;
/// Stack of the thread that compiles: the compiler recurses along chains of rules and references, which are as long as
/// the text allows. Only what is touched takes memory.
const COMPILER_STACK: usize = 512 << 20;

/// What a token stands for in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenBytes {
    /// Bytes of text.
    Text(Vec<u8>),
    /// A special token by its name; it has no text.
    Special(String),
    /// No token has this id.
    Unknown,
}

/// Compiles constraints for the vocabulary of a text, which is indexed when the first one comes. Clones share the index.
#[derive(Clone)]
pub struct Compiler {
    text: Arc<dyn TokenText>,
    grammars: Arc<Mutex<Option<Arc<Grammars>>>>,
}

impl Compiler {
    /// For the vocabulary of `text`.
    pub fn new(text: Arc<dyn TokenText>) -> Self {
        Self { text, grammars: Arc::default() }
    }

    /// The start of a constraint's language; `None` for [`Constraint::None`].
    ///
    /// # Errors
    /// Those of [`Grammars::new`] and [`Grammars::compile`]; [`Error::Request`] when the vocabulary is not known.
    pub fn compile(&self, constraint: &Constraint) -> Result<Option<Grammar>> {
        match constraint {
            Constraint::None => Ok(None),
            constraint => self.grammars()?.compile(constraint),
        }
    }

    fn grammars(&self) -> Result<Arc<Grammars>> {
        let mut grammars = self.grammars.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(grammars) = &*grammars {
            return Ok(Arc::clone(grammars));
        }
        let tokens = self.text.token_bytes();
        let tokens =
            tokens.ok_or_else(|| refused("constraint", "none (unknown vocabulary)", "some".into()))?;
        let indexed = Arc::new(Grammars::new(&tokens, self.text.stop_tokens())?);
        Ok(Arc::clone(grammars.insert(indexed)))
    }
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").finish_non_exhaustive()
    }
}

/// Compiles constraints for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    ends: Arc<[u32]>,
}

impl Grammars {
    /// For the vocabulary `tokens`, by id, in which `ends` end a text.
    ///
    /// # Errors
    /// [`Error::Config`] when no token ends a text, or the vocabulary cannot be indexed.
    pub fn new(tokens: &[TokenBytes], ends: &[u32]) -> Result<Self> {
        let refuse = |key: &str, message: String| {
            Err(Error::Config { what: "constrained decoding".into(), key: key.into(), message })
        };
        let known: Vec<u32> = ends.iter().copied().filter(|&id| (id as usize) < tokens.len()).collect();
        let Some(&end) = known.first() else {
            return refuse("stop tokens", "expected at least one, got none".into());
        };
        let word = |token: &TokenBytes| match token {
            TokenBytes::Text(bytes) => bytes.clone(),
            TokenBytes::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat(),
            TokenBytes::Unknown => Vec::new(),
        };
        let words: Vec<Vec<u8>> = tokens.iter().map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words).with_eos_tokens(&known);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &JSON_SLICES.map(String::from));
        match factory {
            Ok(mut factory) => {
                factory.quiet();
                factory.limits_mut().verbose_errors = false;
                Ok(Self { factory, ends: known.into() })
            }
            Err(error) => refuse("vocabulary", error.to_string()),
        }
    }

    /// The start of a constraint's language; `None` for [`Constraint::None`].
    ///
    /// # Errors
    /// [`Error::Request`] naming the field whose grammar cannot be enforced and why.
    pub fn compile(&self, constraint: &Constraint) -> Result<Option<Grammar>> {
        let (field, grammar) = match constraint {
            Constraint::None => return Ok(None),
            Constraint::JsonObject => ("json_object", json_schema(json!({"type": "object"}))),
            Constraint::JsonSchema(schema) => match schema {
                Value::Object(_) => ("json_schema", json_schema(schema.clone())),
                other => return Err(refused("json_schema", "an object", other.to_string())),
            },
            Constraint::Grammar(text) if text.trim().is_empty() => {
                return Err(refused("grammar", "a Lark grammar", "nothing".into()));
            }
            Constraint::Grammar(text) => ("grammar", TopLevelGrammar::from_lark(text.clone())),
        };
        match self.compile_aside(grammar) {
            Ok(matcher) => Ok(Some(Grammar { matcher, ends: Arc::clone(&self.ends) })),
            Err(why) => {
                // A panic of the compiler comes with its backtrace, which is no caller's business.
                let why = why.split("\n<backtrace>").next().unwrap_or_default();
                Err(refused(field, "a grammar that can be enforced", why.chars().take(MESSAGE).collect()))
            }
        }
    }

    /// Compiles on a thread with a stack of its own size.
    fn compile_aside(&self, grammar: TopLevelGrammar) -> std::result::Result<Matcher, String> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(COMPILER_STACK);
            let compiled = thread.spawn_scoped(scope, || self.matcher(grammar));
            let compiled = compiled.map_err(|error| format!("no thread to compile it: {error}"))?;
            compiled.join().unwrap_or_else(|_| Err("one that makes the compiler panic".into()))
        })
    }

    fn matcher(&self, grammar: TopLevelGrammar) -> std::result::Result<Matcher, String> {
        let mut limits = self.factory.limits().clone();
        let env = self.factory.tok_env().clone();
        let internal = GrammarInit::Serialized(grammar).to_internal(Some(env), limits.clone());
        let (rules, lexemes) = internal.map_err(|error| error.to_string())?;
        // The parser takes these steps without any limit on their work: an intersection of large expressions goes on for
        // hours there.
        let mut checked = lexemes.clone();
        checked.add_extra_lexemes(&self.factory.extra_lexemes());
        let mut lexer = checked.to_regex_vec(&mut limits).map_err(|error| error.to_string())?;
        lexer.set_fuel(limits.initial_lexer_fuel);
        let start = lexer.initial_state(&checked.all_lexemes());
        for byte in 0..=u8::MAX {
            lexer.transition(start, byte);
        }
        if let Some(error) = lexer.get_error() {
            return Err(error);
        }
        let parser = self.factory.create_parser_from_init_default(GrammarInit::Internal(rules, lexemes));
        let matcher = Matcher::new(parser);
        matcher.get_error().map_or(Ok(matcher), Err)
    }
}

/// Parts of JSON whose masks are worth having ready: strings of most kinds.
const JSON_SLICES: [&str; 3] =
    [r#"[^"\\\x00-\x1F\x7F]{1,10}"#, r#"[^"\\\x00-\x1F\x7F]{1,30}"#, r#"[^"\\\x00-\x1F\x7F]+"#];

fn json_schema(mut schema: Value) -> TopLevelGrammar {
    let options = JsonCompileOptions { whitespace_pattern: Some(WHITE_SPACE.into()), ..Default::default() };
    options.apply_to(&mut schema);
    TopLevelGrammar::from_json_schema(schema)
}

fn refused(field: &'static str, expected: &str, got: String) -> Error {
    Error::Request { field, expected: expected.into(), got }
}

/// The state of one constrained text.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    ends: Arc<[u32]>,
}

impl Grammar {
    /// The same state for another text, with caches and limits of its own: clones share theirs.
    pub fn fork(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), ends: Arc::clone(&self.ends) }
    }

    /// The tokens that may come next, stop tokens among them when the text may end here.
    ///
    /// # Errors
    /// What the grammar's limits refuse.
    pub fn mask(&mut self) -> std::result::Result<Mask, String> {
        self.matcher.compute_mask_or_eos().map(Mask).map_err(|error| error.to_string())
    }

    /// Takes in a token of the text. Stop tokens end it.
    ///
    /// # Errors
    /// When the token is not allowed here.
    pub fn advance(&mut self, token: u32) -> std::result::Result<(), String> {
        if self.ends.contains(&token) {
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(|error| error.to_string())
    }

    /// Which nodes of a tree, whose root is the text's last token, the language allows; the root always.
    pub fn allowed(&self, tree: &CandidateTree) -> Vec<bool> {
        let mut children = vec![Vec::new(); tree.tokens().len()];
        for node in 1..children.len() {
            children[tree.tree().parent(node).unwrap_or(0)].push(node);
        }
        let mut walk = Walk {
            matcher: self.matcher.clone(),
            ends: &self.ends,
            tokens: tree.tokens(),
            children: &children,
        };
        let mut allowed = vec![false; children.len()];
        allowed[0] = true;
        walk.below(0, &mut allowed);
        allowed
    }
}

/// Allowed tokens of one position.
#[derive(Clone, Debug)]
pub struct Mask(SimpleVob);

impl Mask {
    /// True when a token may come next.
    pub fn allows(&self, token: u32) -> bool {
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }
}

/// Walks a tree depth first with one matcher that goes forth and back.
struct Walk<'a> {
    matcher: Matcher,
    ends: &'a [u32],
    tokens: &'a [u32],
    children: &'a [Vec<usize>],
}

impl Walk<'_> {
    fn below(&mut self, node: usize, allowed: &mut [bool]) {
        for &child in &self.children[node] {
            let token = self.tokens[child];
            if self.ends.contains(&token) {
                // Nothing follows the end, so its children stay refused.
                allowed[child] = self.matcher.is_stopped() || self.matcher.is_accepting().unwrap_or(false);
                continue;
            }
            allowed[child] = self.matcher.validate_tokens(&[token]).is_ok_and(|valid| valid == 1);
            if allowed[child] && !self.children[child].is_empty() {
                // A matcher that fails refuses everything from here on: that costs speed only.
                if self.matcher.consume_token(token).is_ok() {
                    self.below(child, allowed);
                    let _ = self.matcher.rollback(1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{BuildOptions, build_ddtree};

    /// Single ASCII characters by their code, then the end.
    fn grammars() -> Grammars {
        let mut tokens: Vec<TokenBytes> = (0..128u8).map(|byte| TokenBytes::Text(vec![byte])).collect();
        tokens.push(TokenBytes::Special("<end>".into()));
        Grammars::new(&tokens, &[128]).unwrap()
    }

    fn refusal(constraint: Constraint) -> (String, String) {
        match grammars().compile(&constraint).map(|_| ()) {
            Err(Error::Request { field, got, .. }) => (field.into(), got),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_mask_is_what_the_language_allows_next() {
        let mut grammar =
            grammars().compile(&Constraint::Grammar("start: \"ab\" | \"ac\"".into())).unwrap().unwrap();
        let allowed = |grammar: &mut Grammar| -> Vec<u32> {
            let mask = grammar.mask().unwrap();
            (0..140).filter(|&id| mask.allows(id)).collect()
        };
        assert_eq!(allowed(&mut grammar), [u32::from(b'a')]);
        grammar.advance(u32::from(b'a')).unwrap();
        assert_eq!(allowed(&mut grammar), [u32::from(b'b'), u32::from(b'c')]);
        let mut other = grammar.clone();
        grammar.advance(u32::from(b'c')).unwrap();
        assert_eq!(allowed(&mut grammar), [128]);
        assert_eq!(allowed(&mut other), [u32::from(b'b'), u32::from(b'c')]);
        assert!(other.advance(u32::from(b'x')).is_err());
    }

    #[test]
    fn a_tree_keeps_the_allowed_nodes_of_every_branch() {
        let mut grammar =
            grammars().compile(&Constraint::Grammar("start: \"xab\" | \"xc\"".into())).unwrap().unwrap();
        grammar.advance(u32::from(b'x')).unwrap();
        // Depth 1: a, c, d; depth 2: b and the end under each of them.
        let mut logits = vec![-90.0f32; 2 * 129];
        for (index, token) in [(0, b'a'), (0, b'c'), (0, b'd')] {
            logits[index * 129 + usize::from(token)] = 1.0;
        }
        (logits[129 + usize::from(b'b')], logits[129 + 128]) = (1.0, 1.0);
        let tree =
            build_ddtree(&logits, 129, u32::from(b'x'), BuildOptions { budget: 9, ..Default::default() });
        let tree = tree.unwrap();
        let allowed = grammar.allowed(&tree);
        let path = |node: usize| tree.tree().path(node).iter().map(|&n| tree.tokens()[n]).collect::<Vec<_>>();
        let kept: Vec<Vec<u32>> = (0..allowed.len()).filter(|&n| allowed[n]).map(path).collect();
        let [x, a, b, c] = [b'x', b'a', b'b', b'c'].map(u32::from);
        let mut kept_sorted = kept.clone();
        kept_sorted.sort();
        assert_eq!(kept_sorted, [vec![x], vec![x, a], vec![x, a, b], vec![x, c], vec![x, c, 128]]);
        // The walk went forth and back and left the text's own state alone.
        assert!(grammar.mask().unwrap().allows(a));
    }

    /// Compiles or is refused, within a stack of the size that a compute thread has.
    fn compiled(constraint: Constraint) -> bool {
        let small = std::thread::Builder::new().stack_size(2 << 20);
        let compiled = small.spawn(move || match grammars().compile(&constraint) {
            Ok(grammar) => grammar.unwrap().mask().is_ok(),
            Err(Error::Request { .. }) => false,
            Err(other) => panic!("{other}"),
        });
        compiled.unwrap().join().unwrap()
    }

    #[test]
    fn chains_as_long_as_a_text_allows_overflow_no_stack() {
        for name in ["a", "A"] {
            let mut rules = format!("start: {name}0\n");
            let mut links = 0;
            while rules.len() < 64 * 1024 {
                rules.push_str(&format!("{name}{links}:{name}{}\n", links + 1));
                links += 1;
            }
            rules.push_str(&format!("{name}{links}:\"x\""));
            compiled(Constraint::Grammar(rules));
        }
        let links = 2000;
        let mut definitions: serde_json::Map<String, Value> =
            (0..links).map(|at| (at.to_string(), json!({"$ref": format!("#/$defs/{}", at + 1)}))).collect();
        definitions.insert(links.to_string(), json!({"type": "string"}));
        assert!(compiled(Constraint::JsonSchema(json!({"$defs": definitions, "$ref": "#/$defs/0"}))));
        let mut schema = json!({"type": "string"});
        for _ in 0..100 {
            schema = json!({"type": "array", "items": schema});
        }
        assert!(compiled(Constraint::JsonSchema(schema)));
    }

    #[test]
    fn an_intersection_that_would_compile_for_hours_is_refused() {
        let integers = |modulus: u32| json!({"type": "integer", "multipleOf": modulus});
        assert!(compiled(Constraint::JsonSchema(integers(1000))));
        assert!(!compiled(Constraint::JsonSchema(integers(99_999_937))));
        let terminal = "start: A\nA: /b|(a{1000})+/ & /b|(a{999})+/ & /b|(a{997})+/";
        assert!(!compiled(Constraint::Grammar(terminal.into())));
    }

    #[test]
    fn what_cannot_be_enforced_is_named() {
        assert_eq!(refusal(Constraint::JsonSchema(json!([1]))).0, "json_schema");
        let (field, why) = refusal(Constraint::JsonSchema(json!({"type": "objekt"})));
        assert_eq!(field, "json_schema");
        assert!(why.contains("objekt"), "{why}");
        assert_eq!(refusal(Constraint::Grammar(" ".into())).0, "grammar");
        let (field, why) = refusal(Constraint::Grammar("start: unknown_rule".into()));
        assert_eq!(field, "grammar");
        assert!(why.contains("unknown_rule"), "{why}");
        let (_, why) = refusal(Constraint::Grammar("start: a::0\na::_: \"x\" a::incr([0:64])".into()));
        assert!(why.contains("panic") && !why.contains("backtrace"), "{why}");
        assert!(Grammars::new(&[TokenBytes::Text(vec![1])], &[]).is_err());
    }
}
