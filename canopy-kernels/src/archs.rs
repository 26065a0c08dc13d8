//! Which devices a build has kernels for.

/// Whether kernels built for the architectures `built` (`80,90a`) run on compute capability `sm` (90 for 9.0): machine code of the same major
/// version up to this minor one runs, and the PTX of the newest plain one runs on anything newer.
pub(crate) fn runs_on(sm: u32, built: &str) -> bool {
    let plain: Vec<u32> = built.split(',').filter_map(|arch| arch.parse().ok()).collect();
    let exact = built.split(',').any(|arch| arch.trim_end_matches(char::is_alphabetic) == sm.to_string());
    exact
        || plain.iter().any(|&arch| arch / 10 == sm / 10 && arch <= sm)
        || plain.last().is_some_and(|&arch| arch <= sm)
}

#[cfg(test)]
mod tests {
    use super::runs_on;
    use crate::Error;

    #[test]
    fn an_image_runs_on_its_own_major_version_and_ptx_on_newer_ones() {
        for (sm, built, runs) in [
            (90, "80,90a", true),
            (86, "80,90", true),
            (75, "80,90", false),
            (121, "80,120", true),
            (100, "80,90a", true),
            (80, "86,90", false),
        ] {
            assert_eq!(runs_on(sm, built), runs, "sm {sm} with {built}");
        }
    }

    #[test]
    fn what_the_build_script_builds_runs_from_80_on_and_the_refusal_names_both() {
        let script = include_str!("../build.rs");
        let (_, list) = script.split_once("const ARCHS: &str = \"").unwrap();
        let built = list.split_once('"').unwrap().0;
        for sm in [80, 86, 87, 89, 90, 100, 103, 120, 121, 130] {
            assert!(runs_on(sm, built), "sm {sm} with {built}");
        }
        assert!(!runs_on(75, built));
        let refusal = Error::UnsupportedArch { sm: 75, built: "80,90" }.to_string();
        assert_eq!(refusal, "this build has kernels for sm 80,90; the device is sm 75");
    }
}
