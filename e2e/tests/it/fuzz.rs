//! Random input for what stands between tokens and text: the detokeniser, the stop matcher behind it, and trees that lose
//! nodes.

use std::sync::LazyLock;

use canopy_e2e::constrain::TokenBytes;
use canopy_e2e::embedded;
use canopy_e2e::engine::StopMatcher;
use canopy_e2e::tokenizer::Tokenizer;
use canopy_e2e::tree::{BuildOptions, CandidateTree, build_ddtree};
use proptest::prelude::*;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::load(&embedded::target(), &[]).unwrap());
static BYTES: LazyLock<Vec<TokenBytes>> = LazyLock::new(|| TOKENIZER.token_bytes());

/// The bytes of tokens, special and unknown ones silent.
fn bytes(ids: &[u32]) -> Vec<u8> {
    let of = |&id: &u32| match BYTES.get(id as usize) {
        Some(TokenBytes::Text(bytes)) => bytes.clone(),
        _ => Vec::new(),
    };
    ids.iter().flat_map(of).collect()
}

/// Ids of which many are single bytes, so that characters are cut and bytes are no characters.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![0u32..256, 0u32..6200, Just(u32::MAX)], 0..40)
}

proptest! {
    /// What comes out piece by piece is the text of all bytes; a character that is cut off at the end is dropped.
    #[test]
    fn any_tokens_come_out_as_the_text_of_their_bytes(ids in ids()) {
        let mut detokenizer = TOKENIZER.detokenizer();
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text.push_str(&detokenizer.finish());
        let mut bytes = bytes(&ids);
        let cut = (bytes.len().saturating_sub(3)..bytes.len())
            .find(|&at| std::str::from_utf8(&bytes[at..]).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none()));
        bytes.truncate(cut.unwrap_or(bytes.len()));
        prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes).into_owned());
        prop_assert_eq!(text, TOKENIZER.decode(&ids).unwrap());
    }

    /// Any text survives encoding and piecewise decoding.
    #[test]
    fn any_text_survives(text in "\\PC{0,40}") {
        let mut detokenizer = TOKENIZER.detokenizer();
        let ids = TOKENIZER.encode(&text).unwrap();
        let special = ids.iter().any(|&id| matches!(BYTES[id as usize], TokenBytes::Special(_)));
        let back: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        prop_assert!(special || back == text, "{back:?}");
    }

    /// Stop strings of any characters in any pieces: the text before the one that completes earliest, nothing of it before.
    #[test]
    fn any_stop_strings_cut_where_the_first_completes(
        pieces in prop::collection::vec("[a\u{e4}\u{1f600}\n]{0,5}", 0..12),
        stops in prop::collection::vec("[a\u{e4}\u{1f600}\n]{1,5}", 0..6),
    ) {
        let text = pieces.concat();
        let mut matcher = StopMatcher::new(stops.clone());
        let mut out = String::new();
        for piece in &pieces {
            out.push_str(&matcher.push(piece));
            prop_assert!(stops.iter().all(|stop| !out.contains(stop.as_str())), "{out:?} has a stop string");
        }
        let matched = matcher.matched();
        out.push_str(&matcher.finish());
        let cut = (0..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
            stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(|stop| end - stop.len()).min()
        });
        prop_assert_eq!(out, &text[..cut.unwrap_or(text.len())]);
        prop_assert_eq!(matched, cut.is_some());
    }

    /// A tree that loses nodes keeps the others with their paths, probabilities and order.
    #[test]
    fn a_tree_that_loses_nodes_keeps_the_others_as_they_were(
        logits in prop::collection::vec(-4f32..4.0, 4 * 6),
        budget in 0usize..40,
        keep in prop::collection::vec(prop::bool::weighted(0.7), 41),
    ) {
        let whole = build_ddtree(&logits, 6, 5, BuildOptions { budget, ..Default::default() }).unwrap();
        let nodes = whole.tokens().len();
        let mut pruned = whole.clone();
        pruned.retain(&keep[..nodes]).unwrap();
        let kept: Vec<usize> =
            (0..nodes).filter(|&node| whole.tree().path(node).iter().all(|&n| n == 0 || keep[n])).collect();
        let path = |tree: &CandidateTree, node: usize| -> Vec<u32> {
            tree.tree().path(node).iter().map(|&n| tree.tokens()[n]).collect()
        };
        prop_assert_eq!(pruned.tokens().len(), kept.len());
        for (new, &old) in kept.iter().enumerate() {
            prop_assert_eq!(path(&pruned, new), path(&whole, old));
            prop_assert_eq!(pruned.joint_log_probs()[new], whole.joint_log_probs()[old]);
            prop_assert_eq!(pruned.ranks()[new], whole.ranks()[old]);
        }
        prop_assert!(pruned.retain(&keep[..kept.len() - 1]).is_err());
    }
}
