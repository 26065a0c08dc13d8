//! Drafted tokens put into a list in place: equal to the CPU forward's, the others and what lies around the list untouched.

use std::sync::Arc;

use canopy_kernels::cuda::{DeviceList, Words};
use canopy_kernels::drafted_tokens::{cpu, launch};
use canopy_kernels::top_tokens::row_words;
use cudarc::driver::CudaStream;

use crate::Check;
use crate::data::{Random, text};

pub const TESTS: &[(&str, Check)] = &[("drafted_tokens::lists_are_filled_in_place", fill)];

fn fill(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut random = Random::new(91);
    for round in 0..40 {
        let (rows, k, nodes) = (1 + random.below(60), 1 + random.below(9), 1 + random.below(300));
        let best: Vec<u32> = (0..rows * row_words(k)).map(|_| random.below(1 << 20) as u32).collect();
        let sources: Vec<i32> = (0..nodes).map(|_| random.below(rows * k + 1) as i32 - 1).collect();
        let before: Vec<u32> = (0..nodes).map(|_| random.below(1 << 20) as u32).collect();
        let mut words = Words::default();
        let [_, tokens, of_sources, _] = [
            words.push(vec![77u32; 8], 8),
            words.push(before.iter().copied(), nodes),
            words.push(sources.iter().copied(), nodes),
            words.push(vec![78u32; 8], 8),
        ];
        let upload = words.upload(stream).map_err(text)?;
        let best_there = stream.clone_htod(&best).map_err(text)?;
        let (sources_there, list) =
            (DeviceList::new(&upload, of_sources), DeviceList::new(&upload, tokens.clone()));
        launch::forward(stream, k, &best_there.slice(..), (&sources, &sources_there), &list).map_err(text)?;
        let mut want = words.as_slice().to_vec();
        cpu::forward(k, &best, &sources, &mut want[tokens]).map_err(text)?;
        if stream.clone_dtoh(&*upload).map_err(text)? != want {
            return Err(format!("round {round}: other words than on the CPU"));
        }
    }
    Ok(())
}
