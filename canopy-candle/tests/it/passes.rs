//! Passes on the CPU: never recorded, with the inputs that were given.

use std::cell::Cell;

use candle_core::{Device, Error, Result};
use canopy_candle::{
    AcceptedPaths, CacheRows, DraftTree, GdnDims, List, PassCounts, PassInputs, Passes, TreeBatch,
};

fn batch() -> TreeBatch {
    TreeBatch::new(vec![DraftTree::new(vec![-1, 0, 0]).unwrap(), DraftTree::chain(2).unwrap()], vec![1, 0])
        .unwrap()
}

#[test]
fn on_the_cpu_a_pass_runs_every_time_over_its_inputs() -> Result<()> {
    let device = Device::Cpu;
    let mut passes = Passes::recorded(&device, 2)?;
    let runs = Cell::new(0);
    for _ in 0..4 {
        let paths = AcceptedPaths::new(&batch(), &[vec![0, 2], vec![0]]).unwrap();
        let inputs = PassInputs::new(&device)
            .with_trees(batch(), GdnDims::new(1, 1, 2, 2).unwrap())
            .with_paths(paths)
            .with_ids(&[7, 8])
            .with_list(List::Positions, &[3, 4])
            .with_destinations(CacheRows { cu_rows: &[0, 2], slots: &[0], starts: &[1] }, 8)
            .tagged([5]);
        let ran = passes.run(&inputs, |placed| {
            runs.set(runs.get() + 1);
            Ok::<_, Error>((placed.tree()?.host().rows(), placed.paths()?.host().rows().to_vec()))
        })?;
        assert_eq!(*ran.value, (5, vec![0, 2, 3]));
        assert!(!ran.recording && ran.refused.is_none());
    }
    assert_eq!(runs.get(), 4);
    assert_eq!(passes.counts(), PassCounts::default());
    Ok(())
}

#[test]
fn what_a_pass_was_not_given_is_named_and_its_errors_come_through() {
    let mut passes = Passes::plain();
    let inputs = PassInputs::new(&Device::Cpu);
    let trees = passes.run(&inputs, |placed| placed.tree().map(|_| ())).unwrap_err();
    assert!(trees.to_string().starts_with("pass: trees, expected: some among its inputs, got: none"));
    let paths = passes.run(&inputs, |placed| placed.paths().map(|_| ())).unwrap_err();
    assert!(paths.to_string().starts_with("pass: paths, expected:"));
    let own = passes.run(&inputs, |_| Err::<(), _>(Error::Msg("of the work".into()))).unwrap_err();
    assert_eq!(own.to_string(), "of the work");
}
